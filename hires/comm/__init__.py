"""Sends and receives every message between ranks, with one communication library or several."""

from hires.comm.agreements import PATIENCE_S, broadcast_text, gather_texts, max_all, sum_all
from hires.comm.comm_world import CommWorld, Group, activity, default_world, logged
from hires.comm.ddp_hook import compress
from hires.comm.handles import Handle
from hires.comm.membership import (
    destroy_group,
    get_backends,
    get_process_group_ranks,
    get_rank,
    get_world_size,
    init,
    is_initialized,
    join_world,
    leave_world,
    make_groups,
    new_group,
    shutdown,
)
from hires.comm.message_log import MessageLog
from hires.comm.operations import (
    all_gather,
    all_gather_into_tensor,
    all_reduce,
    all_to_all,
    all_to_all_single,
    barrier,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    reduce_scatter_tensor,
    scatter,
)
from hires.comm.plain_reductions import ReduceOp
from hires.comm.plan_messages import (
    all_gather_coalesced,
    all_gather_stacked,
    all_reduce_coalesced,
    broadcast_coded,
    end_call,
    finish_streams,
    open_channels,
    post,
    reduce_scatter_coalesced,
)
from hires.comm.point_to_point import P2POp, batch_isend_irecv, irecv, isend, recv, send
from hires.comm.rehearsal import rehearsal
from hires.core.errors import CommError as CommError
