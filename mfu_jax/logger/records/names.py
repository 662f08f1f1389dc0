"""Names of metrics that one room writes and others read."""

TENSOR_ACTIVE = "hardware/tensor_active"
"""Share of cycles in which the tensor cores worked, from the devices' own counters: 0 to 1."""

TENSOR_ACTIVE_BY_COUNT = "hardware/tensor_active_by_count"
"""The same share from executed FLOPs, over the same seconds and at the same clock."""

# Further counters, shares unless the name says otherwise.
TENSOR_HMMA_ACTIVE = "hardware/tensor_hmma_active"
TENSOR_IMMA_ACTIVE = "hardware/tensor_imma_active"
TENSOR_DFMA_ACTIVE = "hardware/tensor_dfma_active"
SM_ACTIVE = "hardware/sm_active"
SM_OCCUPANCY = "hardware/sm_occupancy"
DUTY_CYCLE = "hardware/duty_cycle"
DRAM_ACTIVE = "hardware/dram_active"
HBM_USED = "hardware/hbm_used"
PCIE_SENT = "hardware/pcie_tx_bytes_per_sec"
PCIE_RECEIVED = "hardware/pcie_rx_bytes_per_sec"
NVLINK_SENT = "hardware/nvlink_tx_bytes_per_sec"
NVLINK_RECEIVED = "hardware/nvlink_rx_bytes_per_sec"
THROTTLE_SCORE = "hardware/throttle_score"

HARDWARE = ("gpu/", "hardware/")
"""How the names begin of what is read from devices every few seconds."""
