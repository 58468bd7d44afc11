"""What a gang's state machine hears and what it wants done: a table, one message a line."""
# ruff: noqa: UP014

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from atoll.core import events
from atoll.gang.call import Call
from atoll.wire.frames import CallHeader, Frame

_Fields = dict[str, Any]
_MaybeFields = dict[str, Any] | None
_MaybeText = str | None
_MaybeCall = Call | None
_MaybeRank = int | None
_MaybeError = BaseException | None
_Seen = Mapping[int, Mapping[str, Any]]

# Events: these, and a rank's frames as they are.
Submit = NamedTuple("Submit", [("call", Call)])  # a caller wants a call run
Cancel = NamedTuple("Cancel", [("call", Call), ("error", BaseException)])  # it is to end with this error
StreamCredit = NamedTuple("StreamCredit", [("call", Call), ("rank", int), ("num", int)])  # values were taken
StreamClosed = NamedTuple("StreamClosed", [("call", Call), ("rank", int)])  # a consumer wants no more
ChannelClosed = NamedTuple("ChannelClosed", [("rank", int)])  # a rank's ended, while its process may live
ChannelBroken = NamedTuple("ChannelBroken", [("rank", int)])  # user code wrote into a rank's
AgentSaid = NamedTuple("AgentSaid", [("node", int), ("fields", _Fields)])  # an AGENT frame
StacksSeen = NamedTuple("StacksSeen", [("node", int), ("number", int), ("ranks", _Seen)])  # how ranks of a call look
NodeUp = NamedTuple("NodeUp", [("node", int)])  # its agent was started
NodeUnreachable = NamedTuple("NodeUnreachable", [("node", int)])  # the channel to its agent ended
NodeGone = NamedTuple("NodeGone", [("node", int), ("reason", str)])  # why it did is known
Broken = NamedTuple("Broken", [("error", BaseException)])  # the gang can't go on: all calls end with this
Close = NamedTuple("Close", [("unwind", bool)])  # it goes down; are running calls to run their `finally` blocks?
EndCalls = NamedTuple("EndCalls", [])  # what still runs ends now
TimerFired = NamedTuple("TimerFired", [])  # something is due

# Actions.
SendCall = NamedTuple("SendCall", [("call", Call), ("ranks", list[int]), ("header", CallHeader)])  # they need the same
Send = NamedTuple("Send", [("rank", int), ("kind", int), ("number", int), ("fields", _MaybeFields)])  # a frame
Interrupt = NamedTuple("Interrupt", [("rank", int), ("number", int)])  # raise in it, if it still runs this call
Kill = NamedTuple("Kill", [("rank", int), ("fault", _MaybeText)])  # end its process, for what it did
Spawn = NamedTuple("Spawn", [("rank", int)])  # start its process
AskStacks = NamedTuple("AskStacks", [("node", int), ("number", int), ("ranks", list[int])])  # how do they look?
HangUp = NamedTuple("HangUp", [("node", int)])  # its agent does not answer: close the channel
StartNode = NamedTuple("StartNode", [("node", int)])  # again, once what is lost of it is released
Started = NamedTuple("Started", [("call", Call)])  # tell its sink that it was sent
Deliver = NamedTuple("Deliver", [("call", Call), ("frame", Frame), ("node", int)])  # give its sink a frame
Returned = NamedTuple("Returned", [("call", Call)])  # tell its sink that a rank returned while others stream
Resolve = NamedTuple("Resolve", [("call", Call), ("error", _MaybeError), ("reuse", bool)])  # end it; reuse its files?
Emit = NamedTuple("Emit", [("event", events.Event)])  # give it to `on_event`
ShowLog = NamedTuple("ShowLog", [("call", _MaybeCall), ("frame", Frame)])  # a rank printed, maybe while it ran a call
FlushLog = NamedTuple("FlushLog", [("rank", int)])  # show its last line though it has no end
Note = NamedTuple("Note", [("text", str), ("rank", _MaybeRank)])  # show a line of Atoll's own
CloseFiles = NamedTuple("CloseFiles", [("fds", tuple[int, ...])])  # nobody wants a frame
Changed = NamedTuple("Changed", [])  # wake whoever waits for ranks to come up or calls to end

CallerEvent = Submit | Cancel | StreamCredit | StreamClosed
NodeEvent = ChannelClosed | ChannelBroken | AgentSaid | StacksSeen | NodeUp | NodeUnreachable | NodeGone
Event = Frame | CallerEvent | NodeEvent | Broken | Close | EndCalls | TimerFired
RankAction = SendCall | Send | Interrupt | Kill | Spawn | AskStacks | HangUp | StartNode
CallAction = Started | Deliver | Returned | Resolve | CloseFiles | Changed
Action = RankAction | CallAction | Emit | ShowLog | FlushLog | Note
