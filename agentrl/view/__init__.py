"""Find episodes of a recorded run and show them, in the terminal and in a browser."""
