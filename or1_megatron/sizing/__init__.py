"""What a configuration comes to: batch arithmetic, layouts, memory; or why it cannot work."""
