"""Repositories of assistants: load, inspect, convert, export, publish."""
