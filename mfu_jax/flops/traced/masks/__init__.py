"""Attention masks of a traced function: declared or recognised, and the pairs they keep."""
