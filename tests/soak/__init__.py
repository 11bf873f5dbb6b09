"""`make soak`: the large counts, whole."""
