"""An assistant's repository: load, inspect, convert, publish."""
