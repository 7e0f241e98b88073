"""`specdecpp train`: a module for each stage, whose `run(config)` runs the stage or resumes it."""
