"""A recorded step, repeated with the code of the training."""
