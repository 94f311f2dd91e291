"""Every number that the README quotes."""
