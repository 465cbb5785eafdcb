"""Values of any type of Arrow as ids, numbers, times and labels."""
