"""Edge clusters in a box: devices that are slow, small and far apart, on one Linux machine."""
