"""From a model, a calibration and a recipe to a checkpoint folder with its model card."""
