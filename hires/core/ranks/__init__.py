"""What every process of the world needs: its rank, its cores, its heartbeat, its time line."""
