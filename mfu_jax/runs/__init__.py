"""What finished runs came to: metrics files read, benchmarks, projections, published results."""
