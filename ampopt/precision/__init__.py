"""What runs in which dtype: what torch lacks of it, as three small pieces."""
