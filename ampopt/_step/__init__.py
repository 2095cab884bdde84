"""How a step is taken, or left out: nothing in here is for users."""
