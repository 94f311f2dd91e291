"""Other engines, each in an environment of its own and spoken to as a subprocess."""
