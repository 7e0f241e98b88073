"""`rule="throughput"`: measures costs, learns acceptance, maximises tokens per second."""
