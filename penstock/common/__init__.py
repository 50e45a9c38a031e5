"""What several packages need and none of them owns: addresses, TLS, kinds of values, tables of text."""
