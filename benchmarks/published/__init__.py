"""What papers publish beside what the cluster simulator says: figures, known inputs, ranges of the others."""
