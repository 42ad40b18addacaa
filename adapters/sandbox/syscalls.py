"""Filters of system calls (seccomp), as programs that the kernel runs before each call of a process.

Invariant: a filter holds for the process and its descendants, and cannot be removed. It needs no privilege. Does not
own: files, network and other processes that code can see (walls).

The numbers are those of Linux' arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h (aarch64).
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
ALLOW, ERRNO, KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16
"""Offsets in struct seccomp_data; an argument takes 8 bytes, its low half first."""
MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""AUDIT_ARCH of the machines in the tables below."""
X32 = 0x40000000
"""First number of x86's third set of system calls, which nothing here needs."""

NEVER = {
    # new namespaces and mounts: in them a process has every capability, which opens much of the kernel
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "move_mount": (429, 429), "open_tree": (428, 428), "open_tree_attr": (467, 467),
    "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "mount_setattr": (442, 442),
    # other processes
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440), "move_pages": (279, 239), "migrate_pages": (256, 238),
    # memory that no limit of a process counts
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "shmat": (30, 196),
    "shmctl": (31, 195), "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180),
    # much used by attacks on the kernel, and by nothing else here
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "userfaultfd": (323, 282), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "bpf": (321, 280), "perf_event_open": (298, 241), "personality": (135, 92), "fanotify_init": (300, 262),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "modify_ldt": (154, None),
    # the machine
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "quotactl": (179, 60), "swapon": (167, 224), "swapoff": (168, 225),
    "reboot": (169, 142), "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171),
    "clock_adjtime": (305, 266), "sethostname": (170, 161), "setdomainname": (171, 162), "acct": (163, 89),
    "syslog": (103, 116), "iopl": (172, None), "ioperm": (173, None), "vhangup": (153, 58),
}  # fmt: skip
"""System calls refused to all code, with their numbers on x86_64 and aarch64 (None: there is no such call)."""
JUDGED = {
    # processes and programs, so that the limits of one process are those of a judgement
    "fork": (57, None), "vfork": (58, None), "clone": (56, 220), "execve": (59, 221), "execveat": (322, 281),
    # others' signals and processor time
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "setpriority": (141, 140), "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274), "sched_setparam": (142, 118), "ioprio_set": (251, 30),
    # the network and sockets of the machine
    "socket": (41, 198), "socketpair": (53, 199),
    # changes of files; opening one to write is refused by its flags
    "creat": (85, None), "mkdir": (83, None), "mkdirat": (258, 34), "rmdir": (84, None), "unlink": (87, None),
    "unlinkat": (263, 35), "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276), "link": (86, None),
    "linkat": (265, 37), "symlink": (88, None), "symlinkat": (266, 36), "truncate": (76, 45), "chmod": (90, None),
    "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None), "lchown": (94, None),
    "fchown": (93, 55), "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None), "utimensat": (280, 88),
    "futimesat": (261, None), "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7),
    "setxattrat": (463, 463), "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "removexattrat": (466, 466), "mknod": (133, None), "mknodat": (259, 33), "flock": (73, 32),
    "inotify_init": (253, None), "inotify_init1": (294, 26),
}  # fmt: skip
"""Further system calls refused to a judgement, which reads, computes and writes one answer."""
CLONE, CLONE3, PRLIMIT64, SOCKET, SETSOCKOPT = (56, 220), (435, 435), (302, 261), (41, 198), (54, 208)
OPEN, OPENAT, OPENAT2 = (2, None), (257, 56), (437, 437)
NAMESPACES = 0x7E020000
"""The CLONE_NEW flags."""
WRITING = 0x400643
"""O_WRONLY, O_RDWR, O_CREAT, O_TRUNC, O_APPEND and O_TMPFILE."""
SO_SNDBUF, SO_SNDBUFFORCE = 7, 32
FAMILIES = (1, 2, 10)
"""AF_UNIX, AF_INET and AF_INET6; netlink, packets, vsock and the rest are refused."""


def known() -> bool:
    """Returns whether the tables have this machine's system calls."""
    return os.uname().machine in MACHINES


def forbid(*, judged: bool) -> None:
    """Refuses system calls to this process from now on: those of `NEVER`, and for a judgement those of `JUDGED`.

    The process must have given up gaining privileges (PR_SET_NO_NEW_PRIVS).

    Raises:
        OSError: the kernel has no seccomp, or the tables lack this machine.
    """
    code = program(judged=judged)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"seccomp: {os.strerror(error)}")


def program(*, judged: bool) -> bytes:
    """Returns the filter as instructions of the kernel's packet filter, 8 bytes each.

    Raises:
        OSError: the tables lack this machine.
    """
    machine = os.uname().machine
    if machine not in MACHINES:
        raise OSError(errno.ENOSYS, f"the system calls of {machine} are not known")
    column = list(MACHINES).index(machine)
    refuse = statement(RETURN, ERRNO | errno.EPERM)
    code = statement(LOAD, ARCHITECTURE) + statement(EQUAL, MACHINES[machine], 1, 0) + statement(RETURN, KILL_PROCESS)
    code += statement(LOAD, NUMBER) + statement(AT_LEAST, X32, 0, 1) + refuse

    def rule(numbers: tuple[int | None, ...], body: bytes) -> bytes:
        """Returns `body`, preceded by a jump over it for other system calls. The number is loaded before and after."""
        number = numbers[column]
        return b"" if number is None else statement(EQUAL, number, 0, len(body) // 8) + body

    def argument(index: int, tests: Iterable[bytes]) -> bytes:
        """Refuses the call unless one of the tests of an argument jumps over that."""
        body = statement(LOAD, ARGUMENTS + 8 * index) + b"".join(tests) + refuse
        return body + statement(LOAD, NUMBER)

    # If clone3 does not exist, the C library uses clone, whose flags a filter can read.
    code += rule(CLONE3, statement(RETURN, ERRNO | errno.ENOSYS))
    for numbers in (NEVER | JUDGED if judged else NEVER).values():
        code += rule(numbers, refuse)
    code += rule(PRLIMIT64, argument(0, [statement(EQUAL, 0, 1, 0)]))  # only the process's own limits
    if judged:
        code += rule(
            OPENAT2, statement(RETURN, ERRNO | errno.ENOSYS)
        )  # its flags are in memory, which a filter cannot read
        for numbers, index in ((OPEN, 1), (OPENAT, 2)):
            code += rule(numbers, argument(index, [statement(ANY_BIT, WRITING, 0, 1)]))
    else:
        code += rule(CLONE, argument(0, [statement(ANY_BIT, NAMESPACES, 0, 1)]))
        last = len(FAMILIES)
        code += rule(SOCKET, argument(0, [statement(EQUAL, f, last - n, 0) for n, f in enumerate(FAMILIES)]))
        # What a socket holds is charged to no process; with its default size the guard can bound it (`code_child`).
        larger = [statement(EQUAL, SO_SNDBUF, 1, 0), statement(EQUAL, SO_SNDBUFFORCE, 0, 1)]
        code += rule(SETSOCKOPT, argument(2, larger))
    return code + statement(RETURN, ALLOW)


def statement(operation: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """Returns one instruction, a struct sock_filter."""
    return struct.pack("HBBI", operation, if_true, if_false, value)
