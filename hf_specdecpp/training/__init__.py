"""`specdecpp train`: rollouts, distillation of the draft, head, calibration, evaluation, card.

Each stage is a file, and `distillation` a room; its `run(config)` does the stage or goes on with it.
"""
