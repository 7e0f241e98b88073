"""Estimates of acceptance: how likely the target is to accept a candidate."""
