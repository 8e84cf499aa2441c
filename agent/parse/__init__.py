"""Pure parsers: text or bytes of one format in, records out."""
