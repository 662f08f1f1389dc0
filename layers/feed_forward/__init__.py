"""What each token goes through by itself: the MLP, experts and their routers."""
