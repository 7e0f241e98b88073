"""`rule="throughput"`: costs measured, acceptance learned, tokens a second maximised."""
