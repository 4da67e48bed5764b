"""A trained model as others take it: picked by probes, exported, checked, published."""
