"""What ``recd bench flexshard`` is made of: the paper's tables, and tiers trained on gloo."""
