"""Attention masks of a traced function: declared, recognised, and the pairs that they keep."""
