"""`specdecpp train`: rollouts, distillation of the draft, head, calibration, evaluation, card.

Each stage is a room; its `stage.py` has `run(config)`, which does the stage or goes on with it.
"""
