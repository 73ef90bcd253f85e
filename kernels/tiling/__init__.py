"""What kernels of tiled products share on the device."""
