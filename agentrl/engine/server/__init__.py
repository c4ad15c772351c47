"""What engines that are servers have in common: a process, a blocking door, what they answer."""
