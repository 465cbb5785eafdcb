"""Event histories: stores of each user's events, and the windows that training rows read."""
