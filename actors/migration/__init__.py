"""An instance's part in moving samples: the protocol's machines joined to engine, transfer threads and peers."""
