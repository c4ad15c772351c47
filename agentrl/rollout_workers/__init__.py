"""Players of rollouts in other processes (`rollout.workers`)."""
