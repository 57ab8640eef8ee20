"""Which system calls a container may make: a list of its own, because the engine's costs half the time of a start.

The engine's profile is compiled for three instruction sets each time a process is put into a container (start and every exec,
40 ms each). This one holds for the native set only, so 32-bit programs are refused, and is as strict otherwise: what is not
named fails. Left out are namespaces, mounts, modules, keys, clocks, bpf, io_uring, userfaultfd, perf and handles of files.
"""

import json

# names of the Linux system call table that programs without privileges use
ALLOWED = """
accept accept4 access alarm arch_prctl bind brk capget capset chdir chmod chown chroot clock_getres clock_gettime
clock_nanosleep close close_range connect copy_file_range creat dup dup2 dup3 epoll_create epoll_create1 epoll_ctl
epoll_pwait epoll_pwait2 epoll_wait eventfd eventfd2 execve execveat exit exit_group faccessat faccessat2 fadvise64
fallocate fchdir fchmod fchmodat fchown fchownat fcntl fdatasync fgetxattr flistxattr flock fork fremovexattr
fsetxattr fstat fstatfs fsync ftruncate futex futex_waitv futimesat get_robust_list getcpu getcwd getdents
getdents64 getegid geteuid getgid getgroups getitimer getpeername getpgid getpgrp getpid getppid getpriority
getrandom getresgid getresuid getrlimit getrusage getsid getsockname getsockopt gettid gettimeofday getuid getxattr
inotify_add_watch inotify_init inotify_init1 inotify_rm_watch io_cancel io_destroy io_getevents io_pgetevents
io_setup io_submit ioctl ioprio_get ioprio_set kill landlock_add_rule landlock_create_ruleset landlock_restrict_self
lchown lgetxattr link linkat listen listxattr llistxattr lremovexattr lseek lsetxattr lstat madvise membarrier
memfd_create mincore mkdir mkdirat mknod mknodat mlock mlock2 mlockall mmap mprotect mq_getsetattr mq_notify mq_open
mq_timedreceive mq_timedsend mq_unlink mremap msgctl msgget msgrcv msgsnd msync munlock munlockall munmap nanosleep
newfstatat open openat openat2 pause pidfd_open pidfd_send_signal pipe pipe2 pkey_alloc pkey_free pkey_mprotect poll
ppoll prctl pread64 preadv preadv2 prlimit64 process_vm_readv process_vm_writev pselect6 ptrace pwrite64 pwritev
pwritev2 read readahead readlink readlinkat readv recvfrom recvmmsg recvmsg remap_file_pages removexattr rename
renameat renameat2 restart_syscall rmdir rseq rt_sigaction rt_sigpending rt_sigprocmask rt_sigqueueinfo rt_sigreturn
rt_sigsuspend rt_sigtimedwait rt_tgsigqueueinfo sched_get_priority_max sched_get_priority_min sched_getaffinity
sched_getattr sched_getparam sched_getscheduler sched_rr_get_interval sched_setaffinity sched_setattr sched_setparam
sched_setscheduler sched_yield seccomp select semctl semget semop semtimedop sendfile sendmmsg sendmsg sendto
set_robust_list set_tid_address setfsgid setfsuid setgid setgroups setitimer setpgid setpriority setregid setresgid
setresuid setreuid setrlimit setsid setsockopt setuid setxattr shmat shmctl shmdt shmget shutdown sigaltstack
signalfd signalfd4 socketpair splice stat statfs statx symlink symlinkat sync sync_file_range syncfs sysinfo tee
tgkill time timer_create timer_delete timer_getoverrun timer_gettime timer_settime timerfd_create timerfd_gettime
timerfd_settime times tkill truncate umask uname unlink unlinkat utime utimensat utimes vfork vmsplice wait4 waitid
write writev
"""
ARCHITECTURES = {"amd64": "SCMP_ARCH_X86_64", "arm64": "SCMP_ARCH_AARCH64"}
NEW_NAMESPACES = 0x7E020000
AF_VSOCK = 40
EPERM, ENOSYS = 1, 38


def security_option(architecture: str) -> list[str]:
    """The engine's `security_opt` for its own architecture; empty, which is the engine's profile, where ours has none."""
    if architecture not in ARCHITECTURES:
        return []

    def allow(*names: str, **argument: int | str) -> dict[str, object]:
        return {"names": names, "action": "SCMP_ACT_ALLOW", "args": [{"index": 0, **argument}] if argument else []}

    profile = {
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": EPERM,
        "architectures": [ARCHITECTURES[architecture]],
        "syscalls": [
            allow(*ALLOWED.split()),
            allow("clone", value=NEW_NAMESPACES, valueTwo=0, op="SCMP_CMP_MASKED_EQ"),
            allow("socket", value=AF_VSOCK, op="SCMP_CMP_NE"),
            # 0 is plain Linux, the other one only asks
            allow("personality", value=0, op="SCMP_CMP_EQ"),
            allow("personality", value=0xFFFFFFFF, op="SCMP_CMP_EQ"),
            # its flags lie in memory, where a filter cannot look; told that it does not exist, callers take clone
            {"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": ENOSYS},
        ],
    }
    return [f"seccomp={json.dumps(profile)}"]
