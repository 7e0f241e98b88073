"""Pretended devices and graphs, and what runs on them."""
