"""What tests share: fake clocks and devices, small models, recorded programs."""
