"""Episodes of several turns: what `bench episodes` plays, alone and over two instances."""
