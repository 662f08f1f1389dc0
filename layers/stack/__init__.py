"""One layer of the decoder, and how layers follow each other: scanned, remat, pipelined."""
