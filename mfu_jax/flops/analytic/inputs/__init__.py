"""What a model is given as (a name, file, mapping or object) becomes a `ModelConfig`."""
