"""Transports: how the bytes of a migrating sample get from one instance to another."""
