/* Says which signal handlers of a process take locks: preloaded, it stands before libc. A handler that
 * waits for a lock of the thread that it interrupted waits for ever. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

static int (*real_lock)(pthread_mutex_t *);
static int (*real_sigaction)(int, const struct sigaction *, struct sigaction *);
static void (*handlers[NSIG])(int);
static __thread int in_handler;

__attribute__((constructor)) static void find(void) {
    real_lock = dlsym(RTLD_NEXT, "pthread_mutex_lock");
    real_sigaction = dlsym(RTLD_NEXT, "sigaction");
}

int pthread_mutex_lock(pthread_mutex_t * mutex) {
    if (in_handler) {
        static const char said[] = "a signal handler takes a lock\n";
        (void) !write(STDERR_FILENO, said, sizeof(said) - 1);
    }
    return real_lock ? real_lock(mutex) : 0; // before the constructor there is one thread
}

static void handle(int number) {
    ++in_handler;
    handlers[number](number);
    --in_handler;
}

int sigaction(int number, const struct sigaction * action, struct sigaction * old) {
    struct sigaction wrapped;
    if (action && !(action->sa_flags & SA_SIGINFO) && action->sa_handler != SIG_DFL && action->sa_handler != SIG_IGN) {
        wrapped = *action;
        handlers[number] = action->sa_handler;
        wrapped.sa_handler = handle;
        action = &wrapped;
    }
    return real_sigaction(number, action, old);
}
