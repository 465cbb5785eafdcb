"""``recd convert-layout``: the layouts of a table, one into the other."""
