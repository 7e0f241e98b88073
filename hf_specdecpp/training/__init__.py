"""`specdecpp train`: rollouts, distillation of the draft, head, calibration, evaluation, card. One module a stage."""
