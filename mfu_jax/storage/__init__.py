"""Local files and objects in a store: addresses, safe writes, locks, uploads."""
