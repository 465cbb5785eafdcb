"""Process groups, sharders that are exact on every back end, and what collectives send."""
