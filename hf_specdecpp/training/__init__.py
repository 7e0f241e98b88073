"""`specdecpp train`: rollouts, distillation of the draft, head, calibration, evaluation, card. One room a stage, each with `stage.py`."""
