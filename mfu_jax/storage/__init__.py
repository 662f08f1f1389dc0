"""Files on this machine and objects in a store: addresses, safe writes, locks, uploads."""
