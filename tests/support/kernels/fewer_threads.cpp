// Walks a simulated machine: for each line "MILLISECONDS LOST ALONE THREADS" of the input, graphs that take a millisecond are
// computed until so much time has passed. The calling thread has no CPU for LOST of 100 parts of it, or for ALONE of them if
// no other thread computes. Prints for each line how many graphs each number of threads has computed, as "THREADS:GRAPHS".

#include "fewer_threads.h"

#include <cstdio>
#include <map>

int main() {
    mtp::fewer_threads threads;
    long now = 0, milliseconds, lost, alone;
    int n;
    while (scanf("%ld %ld %ld %d", &milliseconds, &lost, &alone, &n) == 4) {
        std::map<int, int> graphs;
        for (const long until = now + 1000 * milliseconds; now < until;) {
            const int used = threads.begin(now, n);
            now += 1000;
            graphs[used]++;
            threads.end(now, 10 * (used > 1 ? lost : alone));
        }
        for (const auto & [used, count] : graphs) {
            printf("%d:%d ", used, count);
        }
        printf("\n");
    }
}
