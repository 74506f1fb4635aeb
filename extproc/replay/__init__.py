"""Any workload under any policy in virtual time: the core that serves production, against models of engines."""
