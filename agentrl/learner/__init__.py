"""The learner: from groups of trajectories to tensors, and from tensors to new weights.

It does not know the run (`agentrl.trainer`): it prints nothing, and writes only its state and the
profiles of its ranks.
"""
