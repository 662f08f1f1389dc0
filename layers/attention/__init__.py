"""Token mixers with softmax: implementations with one signature, and the layers around them."""
